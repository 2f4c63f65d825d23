"""The quadratic mLSTM of `quadratic_triton` with products on tensor cores."""

from functools import partial

from torchstorm.kernels.mlstm import quadratic_triton

forward = partial(quadratic_triton.forward, tensor_cores=True)
backward = partial(quadratic_triton.backward, tensor_cores=True)
empty_saved = quadratic_triton.empty_saved
