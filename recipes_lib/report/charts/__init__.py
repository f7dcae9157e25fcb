"""What is drawn, one kind of chart per file.

bars          rows with names, and columns of bars beside each other
lines         one line per run, named at its end
points        variants with two numbers, and the ones that are worth having
spans         who does what from when to when, in lanes
memory_timeline  live bytes over a step, one panel per step
pattern       which pairs of tokens an attention pattern multiplies
delegated_operators  which operators of an exported model a backend has taken
figure        a figure without a ground, for light and dark pages, with title, key and source
"""
