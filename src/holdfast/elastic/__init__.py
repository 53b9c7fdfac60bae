"""TorchElastic's import paths: `torch.distributed.elastic.X` is `holdfast.elastic.X`.

The one thing to know: there are only re-exports below, under the old names; the code and its
documentation are where each name comes from. Nothing in Holdfast imports this package. Events,
metrics, timers, health checks and the control plane are still to come.
"""
