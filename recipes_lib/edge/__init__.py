"""Models on devices: one file that runs without Python.

cpp_runner    a .pte in a program of some fifty lines of C++, built with the headers of the wheel
export        a model as a .pte file of ExecuTorch, its operators on the kernels of a backend
export_process  an export in another process, its noise in a file, its result kept
gguf_export   a language model as one file for llama.cpp: weights, settings, tokenizer
language_model  a language model as a quantized .pte with its cache, for ExecuTorch's runtime
language_model_lowering  ... from weights to the file, with nothing left to be guessed
language_model_runtime   ... the file in the runtime: the prompt, then token by token
language_model_weights   ... names, order and grid of the weights that ExecuTorch expects
onnx_export   the same as an .onnx file, with whole numbers of 8 bits, in ONNX Runtime
pt2e          a graph with fake quantization, calibrated or trained, for 8-bit kernels
runtime       run a .pte as a device does: planned memory, one thread, measured
size_budget   which links of a chain fit so many megabytes and milliseconds
"""
