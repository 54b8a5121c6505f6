"""tiercache: mount datasets as a filesystem and read them at local-disk speed.

`docs/architecture.md` shows the way of a read through these packages. Imports point down only:
cli -> daemon -> admin, fuse -> engine -> tiers, index -> core; `errors`, `config` and
`metrics.definitions` are leaves that everybody may import.
"""

__version__ = "0.1.0"
