"""How a measurement is shown and kept: tables, charts, source code, recorded results.

ladder          the table of a notebook: one row per step, predicted beside measured, kept as JSON
ladder_text     the lines that a ladder prints, and the cells of its table
rows            rows of any kind of ladder, kept in a file and shown as a table
turns           steps that take turns on the clock, as many as fit into memory together
length_ladder   the same with tokens in place of bytes: how long may the sequence be?
charts          every chart of the notebooks and of the README
style           what all charts have in common: colours with one meaning each, frames, units
show            print code as it is in the package
records         results that another machine measured, from benchmarks/results
"""
