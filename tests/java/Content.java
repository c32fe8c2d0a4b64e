package bookmender;

import java.security.MessageDigest;
import java.util.HexFormat;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.ReadHandle;

/**
 * What a reader sees of a ledger through the Java client.
 *
 * @param lastEntryId the last entry that was read, -1 of an empty ledger
 * @param bytes payload bytes
 * @param sha256 over all payloads, one after the other, in hex
 */
record Content(long lastEntryId, long bytes, String sha256) {
    private static final long BATCH_BYTES = 4 << 20;
    private static final long BATCH_ENTRIES_MAX = 500;

    /** Entries 0 to {@code lastEntryId}, those after the last add confirmed included. */
    static Content read(ReadHandle handle, long lastEntryId) throws Exception {
        MessageDigest sha256 = MessageDigest.getInstance("SHA-256");
        long bytes = 0;
        long batch = 1; // until the first entry was seen
        for (long first = 0; first <= lastEntryId; ) {
            long last = Math.min(lastEntryId, first + batch - 1);
            try (LedgerEntries entries = handle.readUnconfirmedAsync(first, last).get()) {
                for (LedgerEntry entry : entries) {
                    var payload = entry.getEntryNioBuffer();
                    bytes += payload.remaining();
                    sha256.update(payload);
                }
            }
            first = last + 1;
            batch = Math.max(1, Math.min(BATCH_ENTRIES_MAX, BATCH_BYTES * first / Math.max(1, bytes)));
        }
        return new Content(lastEntryId, bytes, HexFormat.of().formatHex(sha256.digest()));
    }
}
