"""PNNs of every form whose tokens halt."""

import torch
from small_models import SMALL, build, some_batch

from pnn.schedule import period

FORMS = {
    "gated": {},
    "published": {"delta_norm": True, "gate_bias": True, "zero_init": False},
    "delta": {"update": "delta"},
    "rewrite": {"update": "rewrite", "positions": "rotary", "ffn": "geglu"},
    "rewrite_no_gate": {"update": "rewrite", "gate": "none"},
    "rounds": {"update": "rewrite", "schedule": [0, 1, 0, 1, 0, 1, 0], "positions": "rotary"},
}
AT = torch.tensor([0, 2, 7, 9, 16, 20])  # packed tokens that are asked for: none of the third sequence's single one


def halting(form, criterion="drawn", **more):
    """A model of which about a third of the tokens halt when they first can."""
    model = build("pnn_equations", **{"num_steps": None if "schedule" in FORMS[form] else 5, **FORMS[form]})
    model.encoder.set_halt({"criterion": criterion, "threshold": 0.5, **more})
    encoder, (ids, mask, _, _) = model.encoder, some_batch()
    with torch.no_grad():
        if criterion == "learned":
            encoder.criterion.weight.copy_(torch.randn(SMALL["hidden_size"], generator=torch.Generator().manual_seed(5)))
        states = model(ids, attention_mask=mask, output_states=True, halt=False).states
        step = period(model.config.schedule)
        measured = encoder.criterion.measure(states[step - 1][mask.bool()], states[step][mask.bool()], model.read_out)
        share = 0.35 if encoder.criterion.when_below else 0.65  # between two tokens, not at one
        threshold = measured.quantile(share)
        if criterion == "learned":  # the middle of what it says
            encoder.criterion.bias.sub_(torch.logit(threshold))
            threshold = 0.5
        encoder.set_halt({"criterion": criterion, "threshold": float(threshold), **more})
    return model
