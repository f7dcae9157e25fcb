"""Measure a step: seconds, tokens per second, the peak bytes of tensors, and their timeline.

"Peak bytes" means the same on both devices. On CUDA it is the allocator's own peak. On a CPU it is
that of an exact account of live storages (`live_bytes.py`).

allocator_peak  peak bytes of tensors where compiled code makes them
device_speed  how fast this device multiplies matrices and reads memory: the limits of a step
dry_run  tensors without data: a step on shapes alone, which costs no memory
dry_values  what a step without data may know: the integers of its batch
free_memory  what is free on the device, the host and in the container, and what the process keeps
live_bytes  an exact account of the bytes of live tensors
machine  what am I running on: device, memory, native bf16, versions, tier
peak_memory  the peak bytes inside a block of code
provenance  where results are written, and what stands beside each: machine, versions, commit
replaced_functions  functions of libraries that want data, and what a dry run puts in their places
step_cost  what a step costs: seconds of the fastest one, peak bytes, timeline
taking_turns  steps that take turns on the clock, there and back, as many as fit into memory
timeline  memory over time: live bytes by kind and phase
"""

from recipes_lib.core.measure.dry_run import dry, dry_run
from recipes_lib.core.measure.peak_memory import PeakMemory, bytes_alive
from recipes_lib.core.measure.step_cost import Measurement, measure, timed
from recipes_lib.core.measure.taking_turns import in_turns, there_and_back

__all__ = [
    "Measurement",
    "PeakMemory",
    "bytes_alive",
    "dry",
    "dry_run",
    "in_turns",
    "measure",
    "there_and_back",
    "timed",
]
