"""What a model is made of.

rope                      longer contexts for a trained model: interpolation, dynamic NTK, YaRN
grouped_query_attention   fewer heads of keys and values, pooled in a trained model: a small cache
rms_norm                  LayerNorm replaced by RMSNorm: exactly, with centred weights, or to train
swiglu                    a gate in the feed-forward layers, at the same number of weights
tied_embeddings           one table for the embedding and the output layer, or two again
deep_thin                 a small language model of more and narrower blocks, at equal weights
mixture_of_experts        many feed-forward layers, of which a token meets a few: grouped products
mobile_net                convolutions in two steps: depthwise filters, inverted residuals
efficient_net             inverted residuals that weigh their channels, scaled in proportion
_convolutions             what both of them share: rounded channels, first weights
"""
