"""Train a PNN on a folder of your own images, and save it for `pipeline("image-classification")`.

python examples/images.py FOLDER OUTPUT      # FOLDER/CLASS/*.png (or .jpg …), one subfolder for each class

Every image becomes 32 × 32 pixels here, cut into 8 × 8 patches. Larger images want larger models, more time and a GPU.
"""

import sys

import torch

import pnn
from pnn.errors import UserError
from pnn.images import Recipe, from_folder, hits_by_step, save, train


def main(folder: str, output: str, epochs: int = 30) -> None:
    images = from_folder(folder, pnn.PNNImageProcessor(image_size=32, num_channels=3))
    learn, held_out = images.split(0.2)
    torch.manual_seed(0)
    config = pnn.PNNImageConfig(
        image_size=32,
        patch_size=4,
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=512,
        update="rewrite",
        initializer_range=0.1,
        id2label=dict(enumerate(images.classes)),
        label2id={name: number for number, name in enumerate(images.classes)},
    )
    model = pnn.PNNForImageClassification(config)
    if torch.cuda.is_available():
        model.cuda()
    train(model, learn, Recipe(epochs=epochs, learning_rate=1e-3))
    hits = hits_by_step(model, held_out)
    for step, share in enumerate(hits.mean(axis=1)):
        print(f"after step {step}: {100 * share:.1f} % of {len(held_out)} held-out images right")
    save(model, output, hits)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/images.py FOLDER OUTPUT")
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
