"""Images: sets of them, training on one device, what a model says after each step, and a folder to share."""

from pnn.images.baseline import vit_of_equal_size
from pnn.images.saving import save
from pnn.images.sets import Images, from_folder
from pnn.images.training import Recipe, hits_by_step, train

__all__ = ["Images", "Recipe", "from_folder", "hits_by_step", "save", "train", "vit_of_equal_size"]
