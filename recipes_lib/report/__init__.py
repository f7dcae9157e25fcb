"""How a measurement is shown and kept: tables, charts, source code, recorded results.

ladder          the table of a notebook: one row per step, predicted beside measured, kept as JSON
ladder_text     the lines that a ladder prints, and the cells of its table
rows            rows of any kind of ladder, kept in a file and shown as a table
turns           steps that take turns on the clock, as many as fit into memory together
speed_ladder    the same with tokens per second, beside what the bandwidth allows
speed_ladder_text  the lines that it prints, and the cells of its table
length_ladder   the same with tokens in place of bytes: how long may the sequence be?
rank_ladder     the same for many ranks: bytes and messages of each, and whether the losses agree
rank_ladder_text  the lines that it prints, and the cells of its table
edge_ladder     the same for devices: quality, size of the file and time, group by group
edge_ladder_text  the lines that it prints, and the cells of its table
charts          charts of bars: ladders of bytes and of lengths, budgets, kinds of operators
timeline_chart  live bytes over a step, one panel per step
loss_charts     curves and changes of the held-out loss, the loss by position
pipeline_chart  the grid of a pipeline: what each rank computes when, and its idle time
growth_chart    bytes against tokens, and the exponent of their growth
speed_chart     bars of tokens per second, each inside the limit of its bytes
token_time_charts  time per token against bytes, and against the position
speculation_chart  speed-up against the accepted part of the drafted tokens
throughput_chart   tokens per second of all texts against the wait of each
speed_charts    one address of the charts about speed, for notebooks
roofline_chart  what memory and arithmetic allow, and what was reached
size_quality_chart  bytes per weight against perplexity
size_error_chart  the size of a file against wrong answers or perplexity
size_axes       the scales of both, and the points that are worth having
runtime_chart   time for one image or token in several programs, with the size of the file
pattern_chart   which pairs of tokens an attention pattern multiplies
image_grid      small images beside each other, each with its class
delegation_chart  which operators of an exported model a backend has taken
rank_bytes_chart  what one rank keeps: bars inside what was predicted, lines over ranks
rank_charts     losses that have to be equal, what more ranks bring, how fast they talk
lanes_chart     what computes and what sends at the same time
strategy_map_chart  the name of what fits, by the size of the model and the number of GPUs
style           what all charts have in common: colours with one meaning each, units, sources
figure          the page and the figure: title, key and source around the axes
bars            rows in groups with their names, labels and whiskers
stacked         stacked bars with numbers inside and the sum at the end
curves          lines that differ without colour, names at their ends
labels          text that fits, and keeps apart
point_labels    names beside points, of which none covers another
show            print code as it is in the package
records         results that another machine measured, from benchmarks/results
overhead_fit  a token's time as a fixed part, and bytes over bandwidth
"""
