"""Models on devices: one file that runs without Python.

cpp_runner    a .pte in a program of thirty lines of C++, built with the headers of the wheel
export        a model as a .pte file of ExecuTorch, its operators on the kernels of a backend
onnx_export   the same as an .onnx file, with whole numbers of 8 bits, in ONNX Runtime
pt2e          a graph with fake quantization, calibrated or trained, for 8-bit kernels
runtime       run a .pte as a device does: planned memory, one thread, measured
size_budget   which links of a chain fit so many megabytes and milliseconds
"""
