package bookmender;

import io.netty.buffer.ByteBuf;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicIntegerArray;
import java.util.concurrent.atomic.AtomicLong;
import java.util.zip.CRC32C;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.net.BookieId;

/** What is found of one ledger's copies. Safe to use from several threads. */
final class LedgerVerdict {
    private static final String NO_SUCH_LEDGER = "no such ledger in the metadata";
    private static final int EXAMPLES_MAX = 10;

    private final long ledgerId;
    private final LedgerMetadata metadata;
    private final int entryCount;
    private final long copyCount;
    private final Set<BookieId> goneBookies;
    private final String error;

    private final AtomicLong unsettled;
    private final AtomicLong payloadBytes = new AtomicLong();
    private final AtomicIntegerArray fingerprints;
    private final AtomicInteger[] counts = new AtomicInteger[CopyState.values().length];
    private final List<Map<String, Object>> examples = new ArrayList<>();

    /** Of a ledger whose copies are to be read; every one of them is then settled once. */
    LedgerVerdict(LedgerMetadata metadata, long lastEntryId, Set<BookieId> goneBookies) {
        this(metadata.getLedgerId(), metadata, Math.toIntExact(lastEntryId + 1), goneBookies, null);
    }

    /** Of a ledger that could not be opened. */
    LedgerVerdict(long ledgerId, Set<BookieId> goneBookies, String error) {
        this(ledgerId, null, 0, goneBookies, error);
    }

    /** Of a ledger that was asked for by its id, and that the metadata does not know. */
    static LedgerVerdict noSuchLedger(long ledgerId) {
        return new LedgerVerdict(ledgerId, Set.of(), NO_SUCH_LEDGER);
    }

    private LedgerVerdict(
            long ledgerId, LedgerMetadata metadata, int entryCount, Set<BookieId> goneBookies, String error) {
        this.ledgerId = ledgerId;
        this.metadata = metadata;
        this.entryCount = entryCount;
        this.copyCount = metadata == null ? 0 : (long) entryCount * metadata.getWriteQuorumSize();
        this.goneBookies = goneBookies;
        this.error = error;
        this.unsettled = new AtomicLong(copyCount);
        this.fingerprints = new AtomicIntegerArray(entryCount);
        for (int at = 0; at < counts.length; at++) {
            counts[at] = new AtomicInteger();
        }
    }

    long ledgerId() {
        return ledgerId;
    }

    int entryCount() {
        return entryCount;
    }

    long copyCount() {
        return copyCount;
    }

    /** GOOD, or DIFFERENT where another copy of this entry was seen before with another payload. */
    CopyState compare(long entryId, ByteBuf payload) {
        CRC32C crc = new CRC32C();
        crc.update(payload.nioBuffer());
        int fingerprint = (int) crc.getValue() | 1; // 0 stands for "not seen yet"
        if (fingerprints.compareAndSet((int) entryId, 0, fingerprint)) {
            payloadBytes.addAndGet(payload.readableBytes());
            return CopyState.GOOD;
        }
        return fingerprints.get((int) entryId) == fingerprint ? CopyState.GOOD : CopyState.DIFFERENT;
    }

    /** True for the last of the copies. */
    boolean settle(long entryId, BookieId bookie, CopyState state) {
        counts[state.ordinal()].incrementAndGet();
        if (state != CopyState.GOOD) {
            synchronized (examples) {
                if (examples.size() < EXAMPLES_MAX) {
                    examples.add(
                            Map.of("entry", entryId, "bookie", bookie.toString(), "problem", state.toString()));
                }
            }
        }
        return unsettled.decrementAndGet() == 0;
    }

    Verdict verdict() {
        long good = count(CopyState.GOOD);
        long unknown = count(CopyState.UNKNOWN);
        if (!goneBookies.isEmpty() || NO_SUCH_LEDGER.equals(error) || good + unknown < copyCount) {
            return Verdict.MISSING;
        }
        return unknown > 0 || error != null ? Verdict.UNKNOWN : Verdict.WHOLE;
    }

    /** The ledger's line of output. */
    Map<String, Object> fields() {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("kind", "ledger");
        fields.put("ledger", ledgerId);
        fields.put("verdict", verdict().toString());
        if (error != null) {
            fields.put("error", error);
        }
        if (metadata != null) {
            fields.put("state", metadata.getState().toString());
            fields.put("entries", entryCount);
            fields.put("bytes", payloadBytes.get());
            fields.put("copies", copyCount);
            fields.put("good", count(CopyState.GOOD));
        }
        fields.put("goneBookies", goneBookies.stream().map(BookieId::toString).toList());
        fields.put("problems", problems());
        fields.put("examples", examples);
        return fields;
    }

    private Map<String, Integer> problems() {
        Map<String, Integer> problems = new LinkedHashMap<>();
        for (CopyState state : CopyState.values()) {
            if (state != CopyState.GOOD && count(state) > 0) {
                problems.put(state.toString(), count(state));
            }
        }
        return problems;
    }

    private int count(CopyState state) {
        return counts[state.ordinal()].get();
    }
}
