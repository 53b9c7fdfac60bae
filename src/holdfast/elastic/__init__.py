"""TorchElastic's import paths: `torch.distributed.elastic.X` is `holdfast.elastic.X`.

The modules below only re-export names. `_impl` has the code that exists only for these names; other
names come from Holdfast's own modules. Nothing in Holdfast imports this package.
"""

from __future__ import annotations

from holdfast.elastic._impl.submodules import bind_submodules

bind_submodules(__name__)
