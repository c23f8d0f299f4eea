"""Training data: data sets, images, augmentation, caches, and the batches that training reads."""
