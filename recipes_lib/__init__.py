"""LLM Training Recipes: one technique, one file. The import line is the address.

Five floors, from the top. A floor uses only those below it.

cli            the command line: python -m recipes_lib list | bench | doctor | finetune

workflows      techniques put together: fine-tuning, the longest sequence, the doctor, the bench

architecture   inside the model: rotary positions, grouped queries, norms, gates, tied embeddings
attention      flash, sliding-window and block-sparse attention
compression    a smaller model from a larger one: distillation, students, pruning
edge           one file that runs without Python: exports, runtimes, a budget of size and time
fine_tuning    adapt a pretrained model: LoRA, QLoRA, loss on answers, evaluation, adapter files
inference      faster answers: decode loop, compiled steps, speculation, batches, a smaller cache
memory         activations, gradients and optimizer states that no longer fit
parallel       training on several ranks: replicas, shards, and parts of the work on each
precision      fewer bits per number: mixed precision, 8-bit states, weights of 16, 8 and 4 bits
training       the loop: accumulation, packing, curriculum, dynamic batch, exact resume, tracking

report         how results are shown and kept: ladders, charts, source code, records

core           what everything stands on: machine, model, corpus, data, budget, measure, timeline
"""
