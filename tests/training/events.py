"""What a tracked run has left for TensorBoard's page."""

import logging
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_back(folder, *, run_name="run"):
    """What TensorBoard's own reader finds: name -> (step, value), the newest of each step."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each resume
    # All values, not a sample. What a resume replaces is left out, as on the page.
    events = EventAccumulator(str(Path(folder) / run_name), size_guidance={"scalars": 0}).Reload()
    found = {}
    for name in events.Tags()["scalars"]:
        values = {event.step: event.value for event in events.Scalars(name)}
        found[name] = sorted(values.items())
    return found
