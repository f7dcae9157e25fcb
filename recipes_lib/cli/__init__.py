"""The command line, `python -m recipes_lib`: one file per command.

app        puts the commands together, and turns expected errors into one line
list       every technique, one line each
bench      measure one technique beside the plain step
doctor     out of memory: what to try, in which order
finetune   adapt a pretrained model to pairs of your own
options    options that several commands take, and the names that their help shows
"""
