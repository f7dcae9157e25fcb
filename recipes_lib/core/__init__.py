"""What everything stands on. Nothing here imports a technique.

model    load a model, find its parts, change them, and prove what a change promises
data     texts, pairs and images as rows and batches, and what a model makes of rows it never saw
measure  the machine, seconds, exact bytes over time, and the rates that limit a step
predict  how many bytes a step will need, before it runs
ranks    several processes: start them, agree, send, and know which rows are whose
checks   checks of arguments, with one form of message
set_up   what a notebook installs, beside the PyTorch that is there
"""
