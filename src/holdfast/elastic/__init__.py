"""TorchElastic's import paths: `torch.distributed.elastic.X` is `holdfast.elastic.X`.

The modules below only re-export. The code that exists for these names alone is in `_impl`; the rest
is where each name comes from. Nothing in Holdfast imports this package.
"""
