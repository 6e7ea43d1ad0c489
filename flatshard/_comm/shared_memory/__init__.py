"""Payloads between ranks of one host, read where they lie in shared memory. A header says where.

``segment.py`` allocates the memory that a rank sends from, ``handshake.py`` maps it into other ranks, ``mailboxes.py`` sends
headers in it, and ``payloads.py`` sends and reads payloads.

[Note: Headers and payloads]
Each rank has a segment of memory that others map. A payload lies there in a block, behind one byte for each rank. To send
it, a rank writes a header with the collective's tag to its mailbox (``mailboxes.py``). A receiver waits for the header, reads
the payload in the sender's segment, and sets its byte. When all bytes are set, the sender uses the block again. A long wait
blocks in gloo. So deaths, timeouts and the watch are those of gloo's messages. No rank waits until another one waits, and no
thread is needed: in training on CPU a rank that waits has a core to spare, its own.

A payload is read in one pass: a gather copies it to its place, a reduction adds it, in rank order.

[Note: What is copied before it is sent]
The input of a reduction lies in the segment from the start (``lend``) and is not copied, as only flatshard writes there. A
gather copies this rank's shard to the segment, cast if needed. Its wait copies all shards from the segments, so its output
needs no memory before (``gathers_late``): a unit that is gathered ahead needs one shard of the segment. A shard may not be
read where it lies: an optimizer, a hook or any other code of the user may write there as soon as the gather has been issued,
and must not wait for other ranks. The same holds for this rank's shard of the gathered values, which the module may change.

[Note: The handshake]
At the first collective of a group, ranks tell each other where their segments are, try to map them, and tell each other
which they could map. If one rank cannot map another's segment (on another host, in another container, or forbidden by the
system), payloads go by gloo in that direction. A thread does that, once for each group, and begins the collectives that have
been issued meanwhile. Those below ``FLATSHARD_SHARED_MEMORY`` bytes are among them: messages of one tag must not overtake
each other. So they begin when all ranks have issued the first one, whatever each of them waits for. A rank may issue it long
before others do. So the thread waits without the group's timeout, and a rank that waits for the thread has it.

[Note: No room]
A payload goes by gloo if the system has no memory for it. Its header says with which tag. Its receiver asks for it in the
wait, so its sender does not wait: it sends a copy, which it drops when the copy has been received.

[Note: Nothing is left behind]
A segment is a file without a name (``memfd_create``), which other ranks open by ``/proc``. It is not in ``/dev/shm``, however
small that is, and the system frees it with the last process that has mapped it, however that ends. A random token in the
segment proves that a rank has mapped the right one. A forked process closes its copies.

[Note: The size of a segment]
It grows to the payloads in flight. In training these are two shards of the largest unit and the input of a reduction, or two
inputs if another rank lags. Neither they nor received payloads take other memory. A payload lies as low as there is room.
At the end of a pass and of a backward (``release_unused``) the segment returns the memory above what both of the last two
have used: in training, that of reductions. So it holds none for them while an optimizer steps, nor when a forward ends, after
which activations take most memory. Blocks that other ranks have yet to read are returned at the first payload after they
have. To return everything would save two shards more and cost as much time again: the system clears each page. The first MiB
is kept in any case, for steps of less time than that takes. Addresses stay, and the file is freed with its group.
"""
