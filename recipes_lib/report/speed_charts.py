"""Charts of a model that writes text, at one address. Each takes plain numbers.

overhead_chart       in token_time_charts   time per token against the bytes of the weights
position_time_chart  in token_time_charts   time per token against the position in the text
speculation_chart    in speculation_chart   speed-up against acceptance, beside the formula
throughput_chart     in throughput_chart    tokens per second of all texts against the wait of one

The chart of a ladder's rows is in `speed_chart`, and the ladder itself draws it. The roofline and
the chart of size against quality have files of their own as well.
"""

from recipes_lib.report.speculation_chart import Speculated, speculation_chart
from recipes_lib.report.throughput_chart import BatchStep, throughput_chart
from recipes_lib.report.token_time_charts import overhead_chart, position_time_chart

__all__ = [
    "BatchStep",
    "Speculated",
    "overhead_chart",
    "position_time_chart",
    "speculation_chart",
    "throughput_chart",
]
