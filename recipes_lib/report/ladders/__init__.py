"""The five ladders of the notebooks: each names its columns, and says what a row measures.

memory  bytes and seconds of a training step, beside its budget (notebooks 01 and 05)
ranks   what each rank keeps and sends, and whether the losses agree (02)
speed   tokens per second, beside what the read bandwidth allows (03)
length  how long a text may be: predicted, and found (04)
edge    quality, size and time of one file per row (06)
"""
