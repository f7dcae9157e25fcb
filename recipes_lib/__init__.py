"""LLM Training Recipes: one technique, one file. The import line is the address.

core            what the techniques share: machine, model, data, budget, measure, ladder
fine_tuning     adapt a pretrained model: LoRA, QLoRA
memory          activations, gradients and optimizer states that no longer fit
precision       fewer bits per number: mixed precision, 8-bit optimizer states
training        the loop: gradient accumulation, dynamic batch size
bench           measure one technique beside the plain step
__main__        the command line: python -m recipes_lib list | bench | doctor
"""
