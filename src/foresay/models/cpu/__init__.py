"""C++ kernels compiled for this machine: matrix products, and the operations between them."""
