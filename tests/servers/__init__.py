"""Real servers for tests: each module has a context manager that starts one on loopback and always ends it.

`weed` (SeaweedFS), `moto`, `rgw` (Ceph, where it is installed) speak S3; `scripted` answers what a test tells it to.
"""
