package bookmender;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Map;
import java.util.Optional;
import java.util.Random;
import java.util.stream.IntStream;
import org.apache.bookkeeper.client.LedgerMetadataBuilder;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.meta.LedgerMetadataSerDe;
import org.apache.bookkeeper.net.BookieId;

/**
 * What Java's own serializer makes of ledger metadata. Needs no cluster.
 *
 * <p>Arguments: a seed, and the number of random metadata to print, as {@link Inspection} does. Then
 * each line of stdin is metadata in hex, and is answered by what Java reads, or by the error.
 */
public final class MetadataSpace {
    private MetadataSpace() {}

    public static void main(String[] arguments) throws Exception {
        Output output = new Output(System.out);
        System.setOut(System.err);
        Random random = new Random(Long.parseLong(arguments[0]));
        for (int left = Integer.parseInt(arguments[1]); left > 0; left--) {
            LedgerMetadata metadata = any(random);
            output.line(Inspection.described(0, metadata, Inspection.serialized(metadata)));
        }
        var stdin = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line = stdin.readLine(); line != null; line = stdin.readLine()) {
            try {
                byte[] bytes = HexFormat.of().parseHex(line);
                LedgerMetadata metadata = new LedgerMetadataSerDe().parseConfig(bytes, 0, Optional.empty());
                output.line(Inspection.described(0, metadata, null));
            } catch (Exception error) {
                output.line("kind", "error", "error", Errors.name(error));
            }
        }
    }

    private static LedgerMetadata any(Random random) {
        int version = 1 + random.nextInt(3);
        int ensembleSize = 1 + random.nextInt(4);
        int writeQuorum = 1 + random.nextInt(ensembleSize);
        var made = LedgerMetadataBuilder.create()
                .withId(0)
                .withMetadataFormatVersion(version)
                .withEnsembleSize(ensembleSize)
                .withWriteQuorumSize(writeQuorum)
                .withAckQuorumSize(version == 1 ? writeQuorum : random.nextInt(writeQuorum + 2) - 1);
        long first = 0;
        for (int left = random.nextInt(3); left >= 0; left--) {
            made.newEnsembleEntry(
                    first,
                    IntStream.range(0, ensembleSize)
                            .mapToObj(index -> BookieId.parse("bookie-" + random.nextInt(1_000) + ":3181"))
                            .toList());
            first += 1 + random.nextInt(1_000_000);
        }
        switch (random.nextInt(3)) {
            case 0 -> made.withInRecoveryState();
            case 1 -> made.withClosedState()
                    .withLastEntryId(random.nextInt(1_000_000) - 1)
                    .withLength(random.nextLong());
            default -> {}
        }
        if (version > 1) {
            DigestType[] types = DigestType.values();
            made.withDigestType(types[random.nextInt(types.length)]).withPassword(bytes(random));
            Map<String, byte[]> custom = new HashMap<>();
            for (int left = random.nextInt(3); left > 0; left--) {
                custom.put("key-\u00e4\"" + random.nextInt(100), bytes(random));
            }
            made.withCustomMetadata(custom);
            if (random.nextBoolean()) {
                made.withCreationTime(random.nextLong() >>> 1).storingCreationTime(true);
            }
        }
        return version == 3 ? made.withCToken(random.nextLong()).build() : made.build();
    }

    private static byte[] bytes(Random random) {
        byte[] bytes = new byte[random.nextInt(20)];
        random.nextBytes(bytes);
        return bytes;
    }
}
