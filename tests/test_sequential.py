"""Stages of a block: what is calibrated together, and in which order. What they are fed: test_loop.py."""

import torch
from torch import nn

from dq.planning import make_plan
from dq.recipe import Recipe, Rule, Target
from dq.sequential import count, stages
from dq.spec import QuantSpec


class Odd(nn.Module):
    """Linears in another order than that of their names, experts of which one sees nothing."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.idle = (nn.Linear(32, 32) for _ in range(3))
        self.experts = nn.ModuleList(nn.ModuleDict(dict(a=nn.Linear(32, 32), b=nn.Linear(32, 32))) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        return self.last(sum(e["b"](e["a"](x)) for e in self.experts[1:]))


def test_stages_of_a_block_are_in_the_order_of_its_calls():
    """All experts of a layer together, and what was never called last."""
    target = Target(QuantSpec.parse("int4/channel"), None)
    rules = tuple(Rule(name, target) for name in ("last", "first", "idle"))
    model = Odd()
    rows = make_plan(model, Recipe("mine", target, rules=rules, min_features=16)).quantized
    found = [[m for r in part for m in r.members] for part in stages(model, rows, lambda: model(torch.zeros(1, 32)))]
    a, b = ([f"experts.{i}.{n}" for i in range(3)] for n in "ab")
    assert found == [["first"], a, b, ["last"], ["idle"]] and count(rows) == 5 and count([]) == 1
