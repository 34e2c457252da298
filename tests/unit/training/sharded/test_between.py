"""The average between replicas of what FSDP2 does not manage."""

import torch

from torchelastic.training.sharded.between import Buckets, buckets


def test_buckets_have_one_dtype_and_a_limit():
    small = [torch.zeros(10) for _ in range(5)]
    half = torch.zeros(4, dtype=torch.float16)
    large = torch.zeros(100)
    found = [[one.numel() for one in each] for each in buckets([*small, half, large, half], 120)]
    assert found == [[10, 10, 10], [10, 10], [4], [100], [4]]


def test_gradients_are_averaged_once_at_the_end_of_each_backward_that_reduces():
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(3)]
    frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    calls, wanted = [], True

    def average(tensor):
        calls.append(tensor.numel())
        tensor.mul_(0.5)

    made = Buckets([*parameters, frozen], average, lambda: wanted)

    def backward():
        for one in parameters:
            one.grad = None
        sum((one * number).sum() for number, one in enumerate(parameters, 1)).backward()
        return [one.grad[0, 0].item() for one in parameters]

    assert backward() == [0.5, 1.0, 1.5]
    wanted = False
    assert backward() == [1.0, 2.0, 3.0]
    made.forget()
    wanted = True
    assert backward() == [0.5, 1.0, 1.5]
    assert calls == [18, 18]
    made.begin()
    frozen.requires_grad_(True)  # in the step
    frozen.sum().backward()
    assert frozen.grad.tolist() == [0.5, 0.5]
