package bookmender;

import java.util.EnumMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;

/** Sums of a judgement: progress once a second, and the last word. Safe to use from several threads. */
final class Tally {
    private static final long PROGRESS_NS = 1_000_000_000L;
    private static final long COPIES_BETWEEN_LOOKS_AT_THE_CLOCK = 1024;

    private final Output output;
    private final int ledgersToDo;
    private final AtomicLong copies = new AtomicLong();
    private final AtomicLong good = new AtomicLong();

    // Guarded by this.
    private final Map<Verdict, Integer> ledgers = new EnumMap<>(Verdict.class);
    private final Map<Verdict, Integer> contents = new EnumMap<>(Verdict.class);
    private long entries;
    private long progressNs = System.nanoTime();

    Tally(Output output, int ledgersToDo) {
        this.output = output;
        this.ledgersToDo = ledgersToDo;
    }

    void copy(CopyState state) {
        if (state == CopyState.GOOD) {
            good.incrementAndGet();
        }
        if (copies.incrementAndGet() % COPIES_BETWEEN_LOOKS_AT_THE_CLOCK == 0) {
            progress();
        }
    }

    synchronized void ledger(LedgerVerdict ledger) {
        entries += ledger.entryCount();
        ledgers.merge(ledger.verdict(), 1, Integer::sum);
    }

    /** Of a ledger whose content was compared with what was expected. */
    synchronized void content(Verdict verdict) {
        contents.merge(verdict, 1, Integer::sum);
    }

    /** Print the last line. */
    synchronized Verdict summary() {
        Verdict verdict = verdict();
        output.line(
                "kind", "summary",
                "verdict", verdict.toString(),
                "ledgers", byName(ledgers),
                "contents", byName(contents),
                "entries", entries,
                "copies", copies.get(),
                "good", good.get());
        return verdict;
    }

    private Verdict verdict() {
        for (Verdict verdict : new Verdict[] {Verdict.MISSING, Verdict.UNKNOWN}) {
            if (ledgers.containsKey(verdict) || contents.containsKey(verdict)) {
                return verdict;
            }
        }
        return Verdict.WHOLE;
    }

    private synchronized void progress() {
        if (System.nanoTime() - progressNs >= PROGRESS_NS) {
            progressNs = System.nanoTime();
            output.line(
                    "kind", "progress",
                    "ledgers", ledgers.values().stream().mapToInt(Integer::intValue).sum(),
                    "ledgersToDo", ledgersToDo,
                    "copies", copies.get());
        }
    }

    private static Map<String, Integer> byName(Map<Verdict, Integer> counts) {
        Map<String, Integer> named = new LinkedHashMap<>();
        for (Verdict verdict : Verdict.values()) {
            named.put(verdict.toString(), counts.getOrDefault(verdict, 0));
        }
        return named;
    }
}
