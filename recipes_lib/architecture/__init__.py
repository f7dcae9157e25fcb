"""What a model is made of.

rope    longer contexts for a trained model: position interpolation, dynamic NTK, YaRN
"""
