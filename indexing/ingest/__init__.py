"""Getting images into a collection: finding, downloading, reading, decoding, encoding and storing them."""
