"""Smaller models made from larger ones.

distillation           train a student on the distribution of a teacher, chunk by chunk
distillation_autograd  ... the loss of a chunk and its gradients
distillation_checks    ... what student and teacher must have in common
distillation_hf        ... the glue to two Hugging Face models
distillation_hidden    ... hidden states brought together block by block
student                a model with fewer blocks and narrower MLPs, made from a trained one
student_parts          ... what a smaller model takes from the larger one: settings and tensors
student_mlps           ... which rows and columns belong to a channel of an MLP
student_heads          ... attention heads: what each group adds, and its rows and columns
student_choice         ... the numbers of the parts that stay, chosen and checked
student_watch          ... text runs through a model, and its parts are looked at
pruning                small weights become zero and stay zero; two of every four
channel_pruning        channels of a network for images, taken out of its blocks
"""
