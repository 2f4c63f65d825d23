"""On a GPU: a compiled loss takes the memory of its logits' gradient, and is near the truth."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from close import assert_close
from torchstorm.offload.compiled.call import Captured
from torchstorm.offload.compiled.loss import compiled_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

VOCABULARY, LENGTH = 32_000, 2048


def test_backward_of_a_compiled_loss_needs_nothing_else_of_the_logits_size_than_their_gradient() -> None:
    """In eager mode it takes copies in float32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).cuda()
    draw = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(1, LENGTH, VOCABULARY, device="cuda", generator=draw).bfloat16().requires_grad_()
    labels = torch.randint(VOCABULARY, (1, LENGTH), device="cuda", generator=draw)

    def run(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model.loss_function(logits, labels, vocab_size=VOCABULARY)
        (gradient,) = torch.autograd.grad(loss, logits)
        torch.cuda.synchronize()
        return loss.detach(), gradient, torch.cuda.max_memory_allocated() - before

    true_loss, true_gradient, _ = run(logits.detach().double().requires_grad_())
    eager_loss, eager_gradient, eager_bytes = run(logits)
    compiled_losses(model, Captured())
    run(logits)  # compiles
    loss, gradient, nbytes = run(logits)
    assert_close(loss, true_loss, eager_loss)
    assert_close(gradient, true_gradient, eager_gradient)
    assert eager_bytes > 4 * logits.nbytes
    assert nbytes < 1.1 * logits.nbytes
