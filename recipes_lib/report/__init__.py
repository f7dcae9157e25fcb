"""How a measurement is shown and kept: one ladder, charts, source code.

ladder        a table that grows by a row per step, with times in turns, kept in a file
ladders       the five ladders of the notebooks: their columns, and what a row measures
charts        what is drawn: bars, lines, points, spans, memory over time
style         colours with one meaning each, numbers in words, sources
overhead_fit  a token's time as a fixed part, and bytes over bandwidth
show          print code as it is in the package
records       results that another machine measured, from benchmarks/results
"""
