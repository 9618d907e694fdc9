"""Training on machines that share no folder: everything that one of them makes and another one needs goes through object storage.

Fed by the weight store, and by workers with the files that they write / feeds workers of any machine with snapshots and states.

    driver ── digests and URLs, over Ray ──▶ worker      names only: no weights and no states travel with a call
    worker ──▶ object storage ──▶ worker, driver         masters, moments, candidates; each file with its digest
"""
