"""What lies between a layer's matrix products, in C++ made for the machine at hand."""
