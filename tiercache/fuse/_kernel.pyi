"""The native side of the FUSE session (_kernel.c). One session a process. Inodes are 63-bit numbers, object ids 20 bytes."""

PASSTHROUGH: int
HAS_RESEND: int
NATIVE_HANDLE: int
MAX_THREADS: int

def prepare(
    directories: tuple[int, ...], threads: int, wanted_flags: int, published_most: int, fuse_fd: int, table_fd: int, /
) -> None:
    """Before pyfuse3.init. `directories`: descriptors of the hot directories, borrowed for the life of the process. `fuse_fd` and
    `table_fd`: a predecessor's, to be taken over, or -1. Raises OSError (EPROTO: a table of another layout)."""

def mounted() -> bool:
    """Do the threads serve? False where libfuse is too old."""

def agrees() -> bool:
    """After a takeover: would the kernel have got the same answer to its FUSE_INIT?"""

def connection() -> tuple[int, int]:
    """Descriptors of the connection and of the table."""

def flags() -> tuple[int, int]:
    """What the kernel offers and what was agreed, bits of FUSE_INIT's flags and flags2."""

def probe(fd: int, /) -> int:
    """The errno with which the kernel refuses the file as a backing file; 0 when it takes it."""

def set_passthrough(enabled: bool, /) -> None: ...
def publish(inode: int, object_id: bytes, directory: int, dataset: int, size_bytes: int, blob: bytes, /) -> bool:
    """From now on opens and reads of the inode may be answered from this hot file. `blob` is given back by `opened`."""

def withdraw(inode: int, /) -> int:
    """Opens are Python's again. How many opens there are, or are just being answered."""

def withdraw_object(object_id: bytes, /) -> int: ...
def uses(object_id: bytes, /) -> int:
    """Opens of the object's inode."""

def hand_over(inode: int, blob: bytes, /) -> bool:
    """Called as the last thing before an OPEN is answered. True: answer with the handle `inode | NATIVE_HANDLE`; reads and the
    release will not come here."""

def opens_fd() -> int:
    """Readable while `take_opens` has something. From the first call on pyfuse3 sees no OPEN any more."""

def take_opens(limit: int, /) -> list[tuple[int, int, int]]:
    """OPENs to be answered: number of the request, inode, flags. At most `limit`, and a bounded number."""

def answer_open(unique: int, errno: int, handle: int, /) -> None:
    """`handle` counts where `errno` is 0."""

def reads_fd() -> int:
    """The same for READs."""

def take_reads(limit: int, /) -> list[tuple[int, int, int, int]]:
    """READs to be answered: number of the request, inode, offset, size. At most `limit`, and a bounded number."""

def answer_read(unique: int, errno: int, data: bytes, /) -> None:
    """`data` is empty where `errno` is not 0."""

def answer_read_from(unique: int, inode: int, fd: int, offset: int, size: int, /) -> None:
    """The answer is what lies there in the file, no byte of it beyond its end: a thread reads it. What is not in the page cache
    goes to pyfuse3 after all. `fd` is needed until this returns."""

def forget_name(parent: int, name: bytes, /) -> None:
    """Python is asked for the name again, however long its last answer was to be believed."""

def harvest(limit: int, /) -> list[tuple[int, bytes, int, int, int, int, int]]:
    """What was used since last asked: inode, object id, dataset, opens, bytes read by the native thread, size, Unix seconds."""

def opened() -> list[tuple[int, int, int, int, bytes]]:
    """Every open inode: opens in passthrough, opens served by the native threads, opens served by Python, `blob`."""

def counts() -> dict[str, int]:
    """Published inodes, backing ids, opens by who serves their reads (passthrough, native, python), counters since the start."""

def stop() -> None:
    """End the threads. Requests not answered are left to a successor."""

def close() -> None:
    """Let go of the connection: without a successor the mount is dead."""
