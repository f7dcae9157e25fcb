"""How a measurement is shown and kept: one ladder, four kinds of charts, source code.

ladder        a table that grows by a row per step, with times in turns, kept in a file
ladders       the five ladders of the notebooks: their columns, and what a row measures
bars          chart: rows with names, and columns of bars beside each other
lines         chart: one line per run, named at its end
points        chart: variants with two numbers, and the ones that are worth having
spans         chart: who does what from when to when, in lanes
timeline      chart: live bytes over a step, one panel per step
pattern       chart: which pairs of tokens an attention pattern multiplies
delegated_operators  chart: which operators of an exported model a backend has taken
figure        a figure without a ground, for light and dark pages, with title, key and source
style         colours with one meaning each, numbers in words, sources
overhead_fit  a token's time as a fixed part, and bytes over bandwidth
show          print code as it is in the package
records       results that another machine measured, from benchmarks/results
"""
