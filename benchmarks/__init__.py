"""Measurements that are recorded, and how they come into the texts.

gpu             the command: every part in a process of its own, in under ten minutes per call
parts           what it measures, one function per part
sizes           what each part is given on each kind of machine
versus          each recipe beside the library that does the same
finetune        QLoRA by our loop and by the Trainer
long_sequences  attention, loss and positions at growing length
long_steps      whole training steps that are as long as memory allows
record          one file of results per machine and day
render          write recorded numbers into README, cheatsheet and notebooks
sentences       ... as sentences
tables          ... as tables
"""
