# Fast kernels come with the package plastic-neural-networks; here the plain equations run.
HAS_TRITON = False
