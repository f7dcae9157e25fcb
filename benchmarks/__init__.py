"""Measurements that are recorded: `gpu` takes them, `record` keeps them, `render` writes them into the texts."""
