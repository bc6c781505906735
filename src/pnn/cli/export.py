from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run folder (also a fine-tuned task's), a checkpoint folder, or a hub name.")],
    output: Annotated[Path, typer.Option(help="New folder for the model.")],
    bf16: Annotated[bool, typer.Option("--bf16", help="Store the weights in bf16, at half the size.")] = False,
    remote_code: Annotated[
        bool | None,
        typer.Option(help="Add the code, for people without this package. Default: if the model has some."),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Add model.onnx, compared with torch in onnxruntime.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="With --onnx: also model_int8.onnx, faster on a CPU.")] = False,
    num_steps: Annotated[int | None, typer.Option(help="Refinement steps of the ONNX graph. Default: the model's.")] = None,
    license: Annotated[
        str | None, typer.Option(help="Licence of the weights, for the model card (mit, cc-by-sa-4.0 …).")
    ] = None,
    push_to: Annotated[str | None, typer.Option(help="Then publish it on the hub, as owner/name (private).")] = None,
) -> None:
    """Write a folder that transformers loads.

    Its model card is made from the run's own files.

    Example: pnn export runs/quickstart/pnn --output exported/pnn
    """
    from pnn.export.run import export_run

    result = export_run(
        run,
        output,
        bf16=bf16,
        remote_code=remote_code,
        with_onnx=onnx,
        int8=int8,
        num_steps=num_steps,
        licence=license,
        push_to=push_to,
    )
    if "onnx_difference" in result:
        steps = f" has {result['onnx_steps']} refinement steps, for good, and" if result["onnx_steps"] else ""
        print(f"model.onnx{steps} differs from torch by at most {result['onnx_difference']:.1e}")
    if result.get("onnx_halts") is False:
        print("model.onnx halts no token, unlike the model itself: each takes all steps, and so does torch in that comparison")
    if "int8_off" in result:
        print(f"model_int8.onnx has logits that are off by {100 * result['int8_off']:.1f} % of their spread")
    print(result["output"])
    if "pushed_to" in result:
        print(result["pushed_to"])
