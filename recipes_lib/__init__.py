"""LLM Training Recipes: one technique, one file. The import line is the address.

core            what the techniques share: machine, model, corpus, data, budget, measure, ladder
architecture    inside the model: rotary positions
attention       flash, sliding-window and block-sparse attention
fine_tuning     adapt a pretrained model: LoRA, QLoRA, loss on answers only, evaluation, adapter files
memory          activations, gradients and optimizer states that no longer fit
precision       fewer bits per number: mixed precision, pure bf16, 8-bit optimizer states
training        the loop: accumulation, packing, curriculum, dynamic batch size, exact resume, tracking
bench           measure one technique beside the plain step
longest         the longest sequence that fits a memory: predicted, found, drawn
finetune        fine-tune a pretrained model: the techniques put together in one loop
finetune_budget   its arithmetic: the peak of a step, before it is taken
finetune_command  the loop as a command, from pairs to a proven adapter
finetune_data     its pairs: read, checked, and a part of them held out
production      the same run through the Trainer and TRL
export          the same run as settings of Axolotl, accelerate, the Trainer and TRL
__main__        the command line: python -m recipes_lib list | bench | doctor | finetune
"""
