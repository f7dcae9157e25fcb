"""Adapt a pretrained model.

lora     train two thin matrices beside each frozen weight
qlora    the same over weights stored in 4 bits
"""
