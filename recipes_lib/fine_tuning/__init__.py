"""Adapt a pretrained model.

adapter_files           save adapters, and load them onto the base that they belong to
completion_only_loss    train on the answers, and compute logits for nothing else
honest_evaluation       held-out loss with an interval, and a paired comparison
lora                    train two thin matrices beside each frozen weight
qlora                   the same over weights stored in 4 bits
"""
