"""Measurements that are recorded, and how they come into the texts.

record              flat records: one file of results per machine and day
render              writes them into README, cheatsheet, notebooks and docs, by templates/*.j2
doctor, traps, pictures
                    ... the arithmetic of an 8B model, the worst traps, the README's picture
published_peaks, family_predictions, recipe_predictions
                    docs/predictions.md: peaks of others, of small models of all families, and of
                    all recipes on twelve of them
on_your_card        docs/on-your-card.md: what the notebooks need on each kind of GPU
long_card           docs/long-card.md: 262,144 tokens on 24 GB

gpu                 the command of `make gpu`: every part in a process of its own
sizes               ... how large on each kind of machine
versus              ... each recipe beside the library that does the same
rope                ... loss along texts beyond the training, with each scaling of positions
long_steps          ... the longest steps: of every weight, and of QLoRA on 24 GB

study               what the programs below share: options, a file that grows, turns, a training
architecture        small models trained both ways, and norms
depths              deep and thin at equal weights
distillation        a student with its teacher and without
fine_tuning_seeds   notebook 05's task with other seeds
function_names      ... and a task that nobody made
own_answers         ... and whether ordinary questions are still answered
long_texts          notebook 04's recipes on 16,384 tokens, and training on 4,096
muon                Muon beside AdamW
quantization_aware  training with the rounding that the file will have, and without
edge                SmolLM2 in a .pte: bytes, load, perplexity and speed, beside generate
int8_images         MobileNetV2 in 8 bits: time by image size, layers, accuracy
image_students      a classifier with its teacher and without
inference_peers     other programs that write text with the same model, in turns with ours
peer_programs, peer_llama_cpp
                    ... those on PyTorch, and the one that reads a file of its own
"""
