package bookmender;

import java.util.Locale;

/** Of a ledger, and of a whole cluster. */
enum Verdict {
    /** Every copy is there and good. */
    WHOLE(Main.WELL),
    /** At least one copy is not there, or not good. */
    MISSING(Main.FOUND),
    /** None was found missing, but not all could be read. */
    UNKNOWN(Main.COULD_NOT_TELL);

    private final int exit;

    Verdict(int exit) {
        this.exit = exit;
    }

    int exit() {
        return exit;
    }

    @Override
    public String toString() {
        return name().toLowerCase(Locale.ROOT);
    }
}
