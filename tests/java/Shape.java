package bookmender;

import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.stream.Stream;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;

/**
 * What a ledger to be written looks like.
 *
 * <p>Options: {@code ensembleSize}, {@code writeQuorum}, {@code ackQuorum}, {@code digest} (Java's
 * names: CRC32, CRC32C, MAC, DUMMY), {@code password}, {@code custom} (texts by name), {@code sizes}
 * (payload bytes, taken in turn) and {@code seed}.
 */
record Shape(Options options) {
    LedgerHandle create(Cluster cluster) throws Exception {
        int writeQuorum = (int) options.number("writeQuorum", 3);
        Map<String, byte[]> custom = new HashMap<>();
        options.object("custom").values().forEach((name, text) -> custom.put((String) name, utf8((String) text)));
        return cluster.client()
                .createLedger(
                        (int) options.number("ensembleSize", writeQuorum),
                        writeQuorum,
                        (int) options.number("ackQuorum", writeQuorum),
                        DigestType.valueOf(options.text("digest", "CRC32C")),
                        utf8(options.text("password", "")),
                        custom);
    }

    /** Endless. The same seed gives the same payloads; {@code number} tells ledgers of one shape apart. */
    Stream<byte[]> payloads(long number) {
        List<Long> sizes = options.numbers("sizes");
        Random random = new Random(options.number("seed", 0) + number);
        return Stream.iterate(0, at -> (at + 1) % sizes.size())
                .map(at -> {
                    byte[] payload = new byte[sizes.get(at).intValue()];
                    random.nextBytes(payload);
                    return payload;
                });
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
