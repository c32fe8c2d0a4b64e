package bookmender;

import org.apache.bookkeeper.client.BKException;

/** What became of one copy of one entry. */
enum CopyState {
    GOOD("good"),
    /** The bookie says that it does not have it. */
    ABSENT("absent"),
    /** The bookie that the metadata names is not registered in ZooKeeper. */
    GONE("bookie-gone"),
    /** Registered, but nothing listens there. */
    UNREACHABLE("bookie-unreachable"),
    /** There, but not what its digest says. */
    CORRUPT("digest-mismatch"),
    /** Its digest is good, but its payload is not that of the entry's other copies. */
    DIFFERENT("differs"),
    /** A time-out, or an error that proves nothing. */
    UNKNOWN("unknown");

    private final String text;

    CopyState(String text) {
        this.text = text;
    }

    /** Of a result code other than OK. */
    static CopyState of(int rc) {
        return switch (rc) {
            case BKException.Code.NoSuchEntryException, BKException.Code.NoSuchLedgerExistsException -> ABSENT;
            case BKException.Code.BookieHandleNotAvailableException -> UNREACHABLE;
            case BKException.Code.DigestMatchException -> CORRUPT;
            default -> UNKNOWN;
        };
    }

    @Override
    public String toString() {
        return text;
    }
}
