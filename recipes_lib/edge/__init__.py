"""Models on devices: one file that runs without Python.

cpp_runner    a .pte in a program of some fifty lines of C++, built with the headers of the wheel
export        a model as a .pte file of ExecuTorch, its operators on the kernels of a backend
gguf_export   a language model as one file for llama.cpp: weights, settings, tokenizer
language_model  a language model as a quantized .pte with its cache, for ExecuTorch's runtime
onnx_export   the same as an .onnx file, with whole numbers of 8 bits, in ONNX Runtime
pt2e          a graph with fake quantization, calibrated or trained, for 8-bit kernels
runtime       run a .pte as a device does: planned memory, one thread, measured
size_budget   which links of a chain fit so many megabytes and milliseconds
_delegated_operators  which operators of a model a backend has taken, and which stay outside
_executorch   the runtime of this process: its kernels, and one pool of threads for all files
_exported_file  what an export leaves behind: one file, whole or not at all
_graph        a model as a graph of operators: what every exporter starts from
_llama        what a program with a Llama of its own takes: the same model, its rows in pairs
_silenced_libraries  keep away what libraries print: their output goes to a file
"""
