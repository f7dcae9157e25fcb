"""What looks after this repository; no recipe needs it.

file_map   docs/file-map.md, written from the docstrings of the package: make texts
"""
