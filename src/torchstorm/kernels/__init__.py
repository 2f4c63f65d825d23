"""Operations with kernels of their own."""
