"""Measurements that are recorded, and how they come into the texts.

gpu             the command: every part in a process of its own, in under ten minutes per call
parts           what it measures, one function per part
sizes           what each part is given on each kind of machine
versus          each recipe beside the library that does the same
finetune        QLoRA by our loop and by the Trainer
long_sequences  attention, loss and positions at growing length
long_steps      whole training steps that are as long as memory allows
architecture    small models trained both ways, and norms
distillation    a student with its teacher and without
quantization_aware  training with the rounding that the file will have, and without
edge            SmolLM2 in a .pte: bytes, load, perplexity and speed, beside generate
int8_images     MobileNetV2 in 8 bits through ONNX Runtime: time by image size, layers, accuracy
family_predictions  predicted and measured peaks of small models of many families
published_peaks     predictions beside the peaks that others have published
inference_peers other programs that write text with the same model, in turns with ours
peer_programs   ... those that run on PyTorch
peer_files      ... and those that read a file of their own

record          one file of results per machine and day
complete        what a run lacks before it can be recorded
render          write recorded numbers into README, cheatsheet and notebooks
cells           ... inside a line
sentences       ... as headlines
facts           ... as what a notebook noted beside its ladder
tables          ... as tables
differences     ... over seeds: the mean, the range, and what they allow to say
render_architecture, render_distillation, render_edge, render_int8_images, render_peers,
render_quantization_aware
                ... of the programs of their own
page            the printed cheatsheet
predictions_page  docs/predictions.md, of family_predictions and published_peaks
"""
