"""Every kernel compiles for the GPUs that we claim, in the shape of the paper's model, without a GPU: Triton brings its own
assembler. What a chip's shared memory or registers cannot hold shows here and not first on a user's machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pnn

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or with the dev extra")

SHARED = {86: 99, 90: 227}  # KiB a block may use, by compute capability
SPILLED = {86: 336, 90: 144}  # bytes of a thread's registers that lie in memory: as few as there are today
CODE = """
import itertools, re, subprocess, sys, tempfile, torch, triton, types
from pathlib import Path
package = types.ModuleType("pnn")  # the kernels need nothing else of ours
package.__path__ = [sys.argv[1]]
sys.modules["pnn"] = package
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pnn.kernels import attention, cross_entropy, diagonal_gate, divergence, gate, live, llama, norm, pointwise, recall, rotary
from pnn.kernels import rewrite_passes, rewriting

reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

def spilled(cubin):  # bytes of a thread that lie in memory because its registers are full
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run([reader, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return re.search("STACK:([0-9]+)", said)[1]

def build(kernel, warps, constants, **types):
    signature = {name: "constexpr" if name in constants else types.get(name) or types[""] for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if str(signature[name]).startswith("*") or "stride" in name
    }
    source = ASTSource(kernel, signature, constants, aligned)
    for capability in map(int, sys.argv[2:]):
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 1})
        name = kernel.__module__.rpartition(".")[2], kernel.__name__, warps
        print(capability, *name, spilled(built.asm["cubin"]), built.metadata.shared, flush=True)

scalars = {"scale": "fp32", "threshold": "i64", "keep_scale": "fp32", "eps": "fp32", "rows": "i32"}
strides = {"stride": "i32", "grad_stride": "i32", "q_stride": "i32", "grad_q_stride": "i32"}
numbers = {**scalars, **strides, "seeds": "*i64"}
for drops in (False, True):
    shape = {"heads": 12, "width": 64, "half": 64, "drops": drops}
    more = {**numbers, "": "*bf16", "log_sums": "*fp32", "borders": "*i32"}
    build(attention.attention_forward, 8 if drops else 4, {**shape, "block_q": 128 if drops else 64}, **more)
    build(attention.attention_backward, 8, {**shape, "block_q": 128}, **more)
    norms = {norm.norm_forward: {"subtracts": True}, norm.norm_backward: {"each": norm.ROWS, "adds": True, "takes_away": True}}
    for (kernel, constants), width in itertools.product(norms.items(), (768, 1536)):
        floats = ("weight", "bias", "x_bias", "means", "inverse_deviations", "shares")
        shape = norm._shape(torch.empty(1, width), None, None, 0.0)
        warps = shape.pop("num_warps")
        shape |= {"has_residual": True, "has_bias": True, "drops": drops}
        build(kernel, warps, {**shape, **constants}, **numbers, **dict.fromkeys(floats, "*fp32"), **{"": "*bf16"})
for mode in range(3):
    shape = {"each": pointwise.ROWS[mode], "width": 2048, "block": 1024, "mode": mode, "drops": mode != 1}
    build(pointwise.pointwise_kernel, 4, shape, **numbers, bias="*fp32", shares="*fp32", **{"": "*bf16"})
for kernel in (gate.gate_forward, gate.gate_backward):
    floats = dict.fromkeys(("temperature", "opening", "shares"), "*fp32")
    build(kernel, 4, {"each": gate.ROWS, "width": 768, "block": 1024, "opens": True}, **numbers, **floats, **{"": "*bf16"})
floats = dict.fromkeys(("product", "opening", "shares"), "*fp32")
each = {"each": diagonal_gate.ROWS}
for kernel, constants in ((diagonal_gate.diagonal_forward, {}), (diagonal_gate.diagonal_backward, each)):
    build(kernel, 4, {"width": 768, "block": 1024, **constants}, **numbers, **floats, **{"": "*bf16"})
for kernel, constants in ((recall.recall_forward, {}), (recall.recall_backward, {"each": recall.ROWS})):
    floats = dict.fromkeys(("share", "shares"), "*fp32")
    build(kernel, 4, {"width": 768, "block": 1024, **constants}, **numbers, **floats, **{"": "*bf16"})
turns = {"cos": "*fp32", "sin": "*fp32", "groups": "i32", "": "*bf16"}
build(rotary._turn, 2, {"half": 32, "block": 32, "back": True}, **numbers, **turns)
halves = ("states", "branches", "new_states", "compressed", "contexts", "grad_new_states", "grad_contexts", "grad_states")
halves = dict.fromkeys((*halves, "grad_branches", "grad_compressed", "histories"), "*bf16")
row = {"width": 768, "block": 256, "pieces": 3}
for count, taps in ((1, 1), (4, 1), (4, 4)):
    shape = {**row, "count": count, "taps": taps, "rewrites": True, "erase": True, "generates": True, "from_state": True}
    more = {**halves, "tokens": "i32", "row_length": "i32", "eps": "fp32", "": "*fp32"}
    for kernel, table, constants in (
        (rewrite_passes.forward, rewriting.FORWARD, {"steps": False}),
        (rewrite_passes.backward, rewriting.BACKWARD, {"has_grad": True}),
    ):
        launch = table[count, taps]
        build(kernel, launch.warps, {**shape, **constants, "each": 32, "stages": launch.stages}, **more)
    if taps > 1:
        one_token = {**shape, "each": 1, "stages": 1, "steps": True}
        build(rewrite_passes.forward, rewriting.FORWARD[count, taps].warps, one_token, **more)
        shape = {"width": 768, "block": 256, "count": count, "taps": taps, "rewrites": True, "each": 32, "stages": 3}
        build(rewrite_passes.mix_backward, rewriting.MIX_BACKWARD.warps, shape, **more)
    writes = {name: ("*bf16",) * 3 for name in ("branches", "new_states")}
    writes |= {name: ("*fp32",) * 3 for name in ("betas", "inverses", "writtens")}
    build(rewrite_passes.make_again, rewriting.MAKE_AGAIN_WARPS, {**row, "count": count}, **{**more, **writes})
rows = {"labels": "*i64", "row_weights": "*fp32", "losses": "*fp32", "logits": "*bf16"}
build(cross_entropy._losses_and_gradients, 8, {"stride": 30592, "vocabulary": 30522, "block": 2048}, **rows)
shape = {"stride": 30592, "vocabulary": 30522, "block": 2048}
rows = {"logits": "*bf16", "wanted": "*bf16", "told": "*i64", "losses": "*fp32", "scale": "fp32"}
for has_told in (False, True):
    build(divergence.divergences, 8, {**shape, "has_told": has_told}, **rows)
floats = {"x": "*fp32", "weight": "*fp32", "inverses": "*fp32", "grad_x": "*fp32", "shares": "*fp32", "": "*bf16"}
for kernel, constants in ((llama.norm_forward, {}), (llama.norm_backward, {"each": llama.ROWS})):
    build(kernel, 4, {"width": 576, "block": 1024, **constants}, **scalars, **floats)
for kernel in (llama.gate_forward, llama.gate_backward):
    build(kernel, 4, {"block": llama.FLAT}, count="i32", **{"": "*bf16"})
steps = dict.fromkeys(("row_stride", "head_stride", "token_stride", "angle_stride", "tokens", "heads"), "i32")
left = {"at": "*i64", "count": "i32", "new_stride": "i32", "kv_stride": "i32", "q_borders": "*i32", "borders": "*i64"}
left |= {"stride": "i32", "scale": "fp32", "threshold": "fp32", "weight": "*fp32", "bias": "*fp32", "sequences": "i32"}
build(live._put, 4, {"width": 1536, "block": 2048}, **left, **{"": "*bf16"})
build(live._attend, 4, {"heads": 12, "width": 64, "block_q": 16, "block_k": 128}, **left, **{"": "*bf16"})
build(live._settled, 4, {"width": 768, "block": 1024, "some": True}, **left, h="*bf16", out="*i1")
build(live._count, 4, {"block": 128}, **left, counts="*i32", **{"": "*i1"})
room = {"room_here": "i32", "room_aside": "i32", "here": "*i64", "aside": "*i64", "ends": "*i32"}
build(live._list_both, 4, {"block": 128}, **left, **room, **{"": "*i1"})
build(llama.turn, 2, {"half": 32, "block": 16, "back": True}, **steps, cos="*fp32", sin="*fp32", **{"": "*bf16"})
"""


@pytest.mark.slow
def test_every_kernel_compiles_and_fits():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    package = str(Path(pnn.__file__).parent)
    command = [sys.executable, "-c", CODE, package, *map(str, SHARED)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    built = [line.split() for line in done.stdout.splitlines()]
    assert len(built) == 46 * len(SHARED)
    for capability, *name, spilled, shared in built:
        assert int(shared) <= SHARED[int(capability)] * 1024, (capability, *name)
        assert int(spilled) <= SPILLED[int(capability)], (capability, *name)
